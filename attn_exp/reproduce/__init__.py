"""Published figures: read them, judge our measurements by them, and find figures that cannot be true."""
