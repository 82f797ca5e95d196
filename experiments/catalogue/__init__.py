"""All methods under the same conditions."""
