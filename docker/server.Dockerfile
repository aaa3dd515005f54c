# MLflow's tracking server with PostgreSQL support. The versions are those of constraints.txt.
FROM python:3.12.12-slim-bookworm
RUN pip install --no-cache-dir mlflow==3.17.2 'psycopg[binary]==3.3.9' \
    && useradd --create-home mlflow \
    && install --directory --owner=mlflow /artifacts
USER mlflow
