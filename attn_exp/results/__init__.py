"""Records as they are read: results, cells, fields, tables, and a machine's calibration."""
