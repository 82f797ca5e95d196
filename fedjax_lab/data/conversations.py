"""Conversations in records: from JSON, Parquet or a table to messages.

The fields of a record decide its form, in this order; fields that are null or NaN count as missing:

1. ``messages``, ``conversations`` or ``conversation``: a list of messages. A message is {"role":
   ..., "content": ...} or, as in ShareGPT, {"from": ..., "value": ...}. A content is text, or a
   list of parts {"type": "text", "text": ...}, whose texts are joined. ``"weight": 0`` leaves an
   assistant's message out of the loss.
2. A question and its answer: ``instruction`` and ``output`` or ``response`` (Alpaca, Dolly), with
   ``input`` or ``context`` after the instruction if it is not empty; or ``prompt`` and
   ``completion`` or ``response``.
3. ``text``: plain text, in which every token is scored.

``system`` or ``system_prompt`` is a system message before the forms 1 and 2. All other fields, such
as Alpaca's ``text`` beside its instruction and output, are ignored. Refused as ambiguous: two lists
of messages, two complete pairs, ``text`` beside an incomplete pair, and ``input`` or ``context``
where nothing says how to join it. Refused because it is not read: ``history``, tools, images.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.data.cells import check_text, is_missing
from fedjax_lab.data.files import open_text, read_parquet
from fedjax_lab.machine.json_file import distinct

Records = str | Path | Iterable[Mapping[str, Any]]
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_LISTS = ("messages", "conversations", "conversation")
_PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
)
_CONTEXTS = ("input", "context")
_SYSTEM = ("system", "system_prompt")
# What would change a conversation, in a record and in a message.
_UNREAD = ("history", "tools", "functions", "image", "images", "audio", "videos")
_UNREAD_IN_MESSAGE = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "image",
    "images",
    "audio",
)


class Message(NamedTuple):
    """A message of a conversation.

    Attributes:
      role: "system", "user" or "assistant"; "" of plain text.
      content: its text.
      scored: whether its tokens are scored.
    """

    role: str
    content: str
    scored: bool = False


def numbered(records: Records) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (location for errors, record); there must be one or more."""
    is_empty = True
    for where, record in _located(records):
        is_empty = False
        if not isinstance(record, Mapping):
            raise ValueError(
                f"{where} is a {type(record).__name__}; it must be an object {{field: value}}. "
                'Of a data frame, give its rows: df.to_dict("records").'
            )
        yield where, record
    if is_empty:
        file = f"is {str(records)!r}, which " if isinstance(records, str | Path) else ""
        raise ValueError(f"records {file}has no conversation; there must be at least one.")


def _located(records: Records) -> Iterator[tuple[str, Any]]:
    """Yield (location, what is there) of a file of JSON lines or of one JSON array, and others."""
    if not isinstance(records, str | Path):
        yield from ((f"records[{number}]", record) for number, record in enumerate(records))
        return
    path = Path(records)
    if not path.is_file():
        raise FileNotFoundError(f"records is {str(path)!r}; there is no such file.")
    if path.suffix == ".parquet":
        rows = read_parquet("records", path).to_pylist()
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))
        return
    with open_text(path) as file:
        text = file.read()
    if text.lstrip().startswith("["):
        parts = enumerate(_parsed(str(path), text), start=1)
        yield from ((f"{path}, record {number}", part) for number, part in parts)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _parsed(where, line)


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: no JSON: {error}. Each line must be a JSON object, or the file one array of "
            "them."
        ) from error


def messages_of(where: str, record: Mapping[str, Any]) -> list[Message]:
    """Return a record's messages; plain text is one.

    Raises:
      ValueError: as ``from_chats``.
    """
    there = {name: value for name, value in record.items() if not is_missing(value)}
    if unread := [name for name in _UNREAD if not _is_empty(there.get(name))]:
        raise ValueError(
            f"{where} has {unread[0]}, which is not read and would change the conversation. Write "
            "it into the messages, or leave it out."
        )
    lists = [name for name in _LISTS if name in there]
    pairs = [pair for pair in _PAIRS if {*pair} <= there.keys()]
    if len(lists) > 1 or (not lists and len(pairs) > 1):
        fields = lists or dict.fromkeys(name for pair in pairs for name in pair)
        raise ValueError(
            f"{where} has {', '.join(fields)}, which are several conversations; leave out all but "
            "one."
        )
    if lists:
        messages = _listed(where, lists[0], there[lists[0]])
    elif pairs:
        messages = _asked(where, there, *pairs[0])
    elif "text" in there and there.keys().isdisjoint(name for pair in _PAIRS for name in pair):
        if any(not _is_empty(there.get(name)) for name in _SYSTEM):
            raise ValueError(f"{where} has text and a system prompt; text has no messages.")
        return [Message("", _text(where, "text", there["text"]), scored=True)]
    else:
        null = [f"{name} (null)" for name in record if name not in there]
        raise ValueError(
            f"{where} has {sorted(map(str, [*there, *null]))}; it must have messages or "
            "conversations, or instruction and output or response, or prompt and completion or "
            "response, or none of these and text."
        )
    for name in _SYSTEM:
        if _is_empty(there.get(name)):
            continue
        if messages[0].role == "system":
            raise ValueError(f"{where} has {name} and a system message; leave out one.")
        messages = [Message("system", _text(where, name, there[name])), *messages]
    return messages


def _listed(where: str, name: str, messages: Any) -> list[Message]:
    if not isinstance(messages, (list, tuple, np.ndarray)) or not len(messages):
        raise ValueError(f"{where}: {name} is {messages!r}; it must be a list of messages.")
    found = []
    for message in messages:
        given = message if isinstance(message, Mapping) else {}
        who, what = ("role", "content") if given.get("role") is not None else ("from", "value")
        role, weight = given.get(who), given.get("weight")
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(
                f"{where}: a message is {message!r}; it must have a role, one of "
                f"{', '.join(ROLES)}, and a content (or from and value)."
            )
        if unread := [key for key in _UNREAD_IN_MESSAGE if not _is_empty(given.get(key))]:
            raise ValueError(f"{where}: a message has {unread[0]}, which is not read.")
        if weight not in (None, 0, 1):
            raise ValueError(f"{where}: a message has weight {weight!r}; it must be 0 or 1.")
        role = ROLES[role]
        scored = role == "assistant" and weight != 0
        found.append(Message(role, _content(where, what, given.get(what)), scored))
    return found


def _asked(where: str, record: Mapping[str, Any], question: str, answer: str) -> list[Message]:
    asked = _text(where, question, record[question])
    contexts = [name for name in _CONTEXTS if not _is_empty(record.get(name))]
    if len(contexts) > 1 or (contexts and question == "prompt"):
        raise ValueError(
            f"{where} has {' and '.join(contexts)} beside {question}; join them to one {question}, "
            "or leave out what is no part of it."
        )
    for name in contexts:
        asked = f"{asked}\n\n{_text(where, name, record[name])}"
    answered = _text(where, answer, record[answer])
    return [Message("user", asked), Message("assistant", answered, scored=True)]


def _content(where: str, field: str, value: Any) -> str:
    """Return the text of a content, which may be a list of parts."""
    if not isinstance(value, (list, tuple, np.ndarray)):
        return _text(where, field, value)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ValueError(
                f"{where}: {field} has a part of the type {kind!r}; only parts of the type 'text' "
                "are read."
            )
        texts.append(_text(where, "text", part.get("text")))
    return "".join(texts)


def _is_empty(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and len(value) == 0)


def _text(where: str, field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {field} is {value!r}; it must be text.")
    return check_text(f"{where}: {field}", value)
