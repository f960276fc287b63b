"""Alignment: match the steps, requests and token rows of two runs."""
