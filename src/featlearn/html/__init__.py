"""Pages that hold everything they need: no network, no script from elsewhere."""

from featlearn.html.ledger import LEDGER_COLUMNS, ledger_table, markdown_ledger, write_ledger
from featlearn.html.records import Record, read_records, record_of
from featlearn.html.report import Section, write_report

__all__ = [
    "LEDGER_COLUMNS",
    "Record",
    "Section",
    "ledger_table",
    "markdown_ledger",
    "read_records",
    "record_of",
    "write_ledger",
    "write_report",
]
