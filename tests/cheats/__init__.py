"""Backends that cheat or err, each with the status that it must get; and honest but odd ones, which stay `ok`.

`docs/checks.md` says which mistakes are found.
"""
