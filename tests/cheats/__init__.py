"""Backends that cheat or err, each with the status that it must get; and honest but odd ones, which stay `ok`.

`docs/cheats.md` is made from them: `cd tests && python -m cheats.page`.
"""
