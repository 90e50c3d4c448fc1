"""Data of any equation: read, made, checked and written."""

from ups.data.write import write_fields as write_fields
