"""The proofs that a machine is measured right, each a function from a bench to a finding."""
