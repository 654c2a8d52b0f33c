"""A mailbox in SQLite's full-text search, and the loader of the Enron emails for those who have them.

It stores, finds and reads. It knows nothing about questions, models or rewards. What somebody wrote into an email is
data: no text of it reaches SQL or the query language of the search.
"""

from __future__ import annotations

import email.message
import email.parser
import re
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import islice
from pathlib import Path

SCHEMA = (
    "CREATE TABLE emails (id INTEGER PRIMARY KEY, sender, recipients, date, subject, body, original_id)",
    "CREATE INDEX by_original_id ON emails (original_id)",
    "CREATE VIRTUAL TABLE words USING fts5(sender, recipients, subject, body,"
    " content='emails', content_rowid='id', tokenize='porter unicode61')",
)
COLUMNS = "sender, recipients, date, subject, body, original_id"


@dataclass(frozen=True)
class Email:
    sender: str
    recipients: str
    date: str  # ISO, e.g. "2001-05-14"; "" where the email has none that can be read
    subject: str
    body: str
    original_id: str = ""  # its Message-ID header


@dataclass(frozen=True)
class Hit:
    """One line of a search result."""

    message_id: str
    sender: str
    date: str
    subject: str
    snippet: str


class Mailbox:
    """Emails numbered from 1 in the order given; a message id is that number as text, for it costs few tokens.

    With a `database` path the emails stay there, and are not read again from `emails` the next time. May be
    searched from any thread.
    """

    def __init__(self, emails: Iterable[Email] = (), database: str | Path = ":memory:") -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(database, check_same_thread=False, isolation_level=None)
        self._close = weakref.finalize(self, self._db.close)
        if self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'emails'").fetchone():
            return
        self._db.execute("BEGIN")  # all or nothing: a killed import leaves an empty file
        for statement in SCHEMA:
            self._db.execute(statement)
        rows = ((e.sender, e.recipients, e.date, e.subject, e.body, e.original_id) for e in emails)
        self._db.executemany(f"INSERT INTO emails ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._db.execute("INSERT INTO words (words) VALUES ('rebuild')")
        self._db.execute("COMMIT")

    def search(
        self,
        keywords: Sequence[str],
        *,
        sender: str | None = None,
        recipient: str | None = None,
        sent_after: str | None = None,
        sent_before: str | None = None,
        limit: int = 10,
    ) -> list[Hit]:
        """Emails that hold all words, best first; if there are none, those that hold any of them.

        `sender` and `recipient` are parts of the name or address; the dates are ISO days, the second not included.
        """
        terms = [f'"{word}"' for word in re.findall(r"\w+", " ".join(keywords))]
        if not terms:
            return []
        where, values = "", []
        for column, part in (("sender", sender), ("recipients", recipient)):
            if part:
                where += f" AND instr(lower(emails.{column}), ?)"
                values.append(part.lower())
        for sign, day in ((">=", sent_after), ("<", sent_before)):
            if day:
                where += f" AND emails.date != '' AND emails.date {sign} ?"
                values.append(day)
        sql = (
            "SELECT emails.id, emails.sender, emails.date, emails.subject, snippet(words, 3, '', '', '…', 12)"
            f" FROM words JOIN emails ON emails.id = words.rowid WHERE words MATCH ?{where}"
            " ORDER BY bm25(words), emails.id LIMIT ?"
        )
        for joint in (" AND ", " OR "):
            with self._lock:
                rows = self._db.execute(sql, (joint.join(terms), *values, max(1, limit))).fetchall()
            if rows:
                return [Hit(str(number), *rest) for number, *rest in rows]
        return []

    def read(self, message_id: str) -> Email | None:
        """The email, or None where there is no such number."""
        if not re.fullmatch(r"[0-9]{1,12}", message_id):
            return None
        with self._lock:
            row = self._db.execute(f"SELECT {COLUMNS} FROM emails WHERE id = ?", (int(message_id),)).fetchone()
        return Email(*row) if row else None

    def number_of(self, original_id: str) -> str | None:
        """The message id here of a Message-ID header."""
        with self._lock:
            row = self._db.execute("SELECT id FROM emails WHERE original_id = ?", (original_id,)).fetchone()
        return str(row[0]) if row else None

    def __len__(self) -> int:
        with self._lock:
            count: int = self._db.execute("SELECT count(*) FROM emails").fetchone()[0]
        return count

    def close(self) -> None:
        self._close()


def load_enron(source: str | Path, *, database: str | Path = ":memory:", limit: int | None = None) -> Mailbox:
    """The Enron emails as a mailbox.

    `source` is the maildir (a folder tree of one file per email, from https://www.cs.cmu.edu/~enron/), one person's
    folder in it, or the CSV with a column `message`. All 517,401 emails take minutes: give a `database` file to pay
    that once, or a `limit` for the first emails in order of path. Raises FileNotFoundError, and ValueError where
    `source` holds no email.
    """
    if database != ":memory:" and Path(database).is_file():
        return Mailbox(database=database)
    source = Path(source)
    if not source.exists():
        raise FileNotFoundError(f"{source} is not there; get the emails from https://www.cs.cmu.edu/~enron/")
    texts = _maildir_texts(source) if source.is_dir() else _csv_texts(source)
    first = list(islice(texts, 1))
    if not first:
        raise ValueError(f"{source} holds no email")
    more = None if limit is None else max(0, limit - 1)
    return Mailbox((parse_email(text) for part in (first, islice(texts, more)) for text in part), database)


def _maildir_texts(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            yield path.read_bytes().decode("utf-8", errors="replace")


def _csv_texts(path: Path) -> Iterator[str]:
    import pandas as pd  # its reader has no limit on the length of a field, and needs no process-wide setting for that

    for chunk in pd.read_csv(path, usecols=["message"], dtype=str, chunksize=1000):
        yield from chunk["message"].dropna()


def parse_email(text: str) -> Email:
    """An email from its source text: plain-text parts only, attachments left out."""
    message = email.parser.Parser().parsestr(text)
    parts = message.walk() if message.is_multipart() else [message]
    body = "\n".join(_plain_text(part) for part in parts if part.get_content_type() == "text/plain")
    try:
        date = parsedate_to_datetime(str(message["Date"])).date().isoformat()
    except (ValueError, TypeError):
        date = ""

    def header(*names: str) -> str:
        return " ".join(" ".join(str(message[name]).split()) for name in names if message[name])

    return Email(header("From"), header("To", "Cc"), date, header("Subject"), body.strip(), header("Message-ID"))


def _plain_text(part: email.message.Message) -> str:
    payload = part.get_payload(decode=True)
    if not isinstance(payload, bytes):
        return str(part.get_payload())
    try:
        return payload.decode(part.get_content_charset() or "utf-8", errors="replace")
    except LookupError:  # a charset that nobody knows
        return payload.decode("utf-8", errors="replace")
