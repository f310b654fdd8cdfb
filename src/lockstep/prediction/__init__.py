"""Prediction: a row for each sample, in order, on any number of devices."""
