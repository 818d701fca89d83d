"""Installs with tools that look for this file; what pyproject.toml can say is declared there."""

from setuptools import setup
from setuptools.command.sdist import sdist


class WithoutTests(sdist):
    """A source distribution without the few files that lie directly in tests/, which need the others there."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, [file for file in files if not file.startswith("tests")])


setup(cmdclass={"sdist": WithoutTests})
