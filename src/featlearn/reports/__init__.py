"""Self-contained HTML reports, which work offline."""

from featlearn.reports.html import Section, write_report

__all__ = ["Section", "write_report"]
