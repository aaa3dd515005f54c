"""Charts: what was measured as pictures, with matplotlib, which is imported only where something is drawn."""
