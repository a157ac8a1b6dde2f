"""What both panels share: settings, jobs, batching, graphs, quantization. Knows neither images nor text."""
