"""Find the version of a package, or the commit, that made a case slower."""
