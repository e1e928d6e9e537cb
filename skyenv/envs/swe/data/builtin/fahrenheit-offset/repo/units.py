"""Temperatures."""

ABSOLUTE_ZERO = -273.15


def to_fahrenheit(celsius):
    """Convert degrees Celsius to degrees Fahrenheit."""
    return celsius * 9 / 5 - 32


def to_celsius(fahrenheit):
    """Convert degrees Fahrenheit to degrees Celsius."""
    return (fahrenheit - 32) * 5 / 9


def to_kelvin(celsius):
    """Convert degrees Celsius to kelvins."""
    return celsius - ABSOLUTE_ZERO
