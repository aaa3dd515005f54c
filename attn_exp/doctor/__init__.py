"""The checks that a machine is measured correctly, each a function from a bench to a finding."""
