"""Installs with tools that look for this file; everything is declared in pyproject.toml."""

from setuptools import setup

setup()
