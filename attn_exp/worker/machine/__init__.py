"""The machine of jobs: device, ceilings, clocks and telemetry, and the state that a backend must leave as it is."""
