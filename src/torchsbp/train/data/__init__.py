"""Data: samples by number, their order, and who reads them."""
