"""The list of packages; everything else about the distribution is in pyproject.toml.

`kernels/`, `spec/` and `patches/` lie beside `sglang_afd/` and are imported as `sglang_afd.kernels`
and so on (pyproject.toml's package-dir). setuptools' own search takes a directory's path as
the package's name, so it cannot find them under that name.
"""

from setuptools import find_packages, setup


def _mapped(directory: str) -> list[str]:
    """Names of the packages under a top-level directory, as imported from sglang_afd."""
    names = [directory, *(f"{directory}.{name}" for name in find_packages(directory))]
    return [f"sglang_afd.{name}" for name in names]


setup(
    packages=[
        *find_packages(include=["sglang_afd", "sglang_afd.*"]),
        *_mapped("kernels"),
        *_mapped("spec"),
        *_mapped("patches"),
    ]
)
