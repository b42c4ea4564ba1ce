"""The tests, a package: a folder without this file is hidden by Python's own package `test`."""
