"""A study of all methods under the same conditions."""
