"""Pages that hold everything they need: no network, no script from elsewhere."""

from featlearn.reports.html import Section, write_report

__all__ = ["Section", "write_report"]
