"""Find the version of a package that made a case slower."""
