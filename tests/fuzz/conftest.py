"""Counts the cases of a run, over all processes of pytest-xdist."""

import pytest

CASES = "fuzz_cases"


@pytest.fixture
def count_case(record_property):
    """Call it once a case; the sum is printed at the end of the run."""
    count = 0

    def one_more():
        nonlocal count
        count += 1

    yield one_more
    record_property(CASES, count)


def pytest_terminal_summary(terminalreporter):
    reports = [report for report in terminalreporter.getreports("") if report.when == "teardown"]
    cases = sum(value for report in reports for name, value in report.user_properties if name == CASES)
    if cases:
        terminalreporter.write_line(f"{cases} fuzz cases")
