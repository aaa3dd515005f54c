"""Where jobs run: the device, its ceilings, clocks and telemetry, and the state that a backend must leave as it is."""
