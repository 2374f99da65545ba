"""The tests: python -m twisted.trial tests."""
