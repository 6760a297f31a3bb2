"""Conformance suites for pytest: subclass the test case of a protocol to test your own class.

`environments` is for `GroupEnvironment`, `members` for `Members`, `strategies` for `Strategy`, and
`samplers` for `Sampler`.
A subclass implements the abstract methods and inherits all tests. pytest must be installed.
"""

import pytest

# Assertions of these files then show the compared values, as in test files.
pytest.register_assert_rewrite(
    *(f"{__name__}.{suite}" for suite in ("environments", "members", "samplers", "strategies"))
)
