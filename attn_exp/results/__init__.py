"""Records as they are read: store, read, result, cell, table, calibration."""
