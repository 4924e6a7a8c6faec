"""All that is to be measured on a card, by one command: `python -m benchmarks.gpu`."""
