r"""Search for cases that a backend computes wrongly: the process behind `attn-exp hunt`.

1. [\_\_main\_\_.py](__main__.py) takes the question from standard input and answers with the state of the search.
2. [space.py](space.py) draws examples with Hypothesis, within what the backend and `where=` allow.
3. [search.py](search.py) runs Hypothesis on them until the budget is spent, and keeps the simplest that fails.
4. [tester.py](tester.py) hands each example to a forked process, which may die of it, and
   [judge.py](judge.py) there compares the backend's results with the reference.
5. [script.py](script.py) writes what was found as a program of its own.
"""
