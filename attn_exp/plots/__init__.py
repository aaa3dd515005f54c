"""Charts of measurements, drawn with matplotlib, which is imported only when a chart is drawn."""
