"""Instructions and chats: from JSON lines or a table of records to the rows of each client.

A record is a conversation in one of these forms; other fields are ignored:

- ``messages``: a list of {"role": ..., "content": ...}, as in chat data sets;
- ``instruction``, ``input`` (may be missing or empty) and ``output``, as in Alpaca;
- ``prompt`` and ``completion`` (or ``response``);
- ``text``: plain text, in which every token is scored.

In the other forms, only the assistant's messages and the tokens that end them are scored.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_lab.checks import check_choice
from fedjax_lab.data.cells import check_text
from fedjax_lab.data.clients import from_clients
from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.packing import Sentence, pack
from fedjax_lab.data.sources import Examples
from fedjax_lab.signatures import suggest_keywords

Records = str | Path | Iterable[Mapping[str, Any]]
ROLES = ("system", "user", "assistant")


class Template(NamedTuple):
    """The special tokens around messages.

    Attributes:
      start: text before a conversation.
      before: text before each message; "{role}" is replaced by the role.
      end: text after each message; it is scored if the message is.
      gap: text between messages.
    """

    start: str
    before: str
    end: str
    gap: str


TEMPLATES = {
    "chatml": Template("", "<|im_start|>{role}\n", "<|im_end|>", "\n"),  # Qwen2 and others
    "llama3": Template(
        "<|begin_of_text|>", "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", ""
    ),
}


def load_tokenizer(file: str | Path) -> Any:
    """Read a tokenizer of the library ``tokenizers``, such as a model's ``tokenizer.json``.

    Args:
      file: a JSON file; or a folder that contains ``tokenizer.json``.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged.
      ImportError: the package tokenizers is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(
            "a tokenizer needs the package tokenizers: `pip install 'fedjax-lab[pretrained]'`."
        ) from error
    path = Path(file)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise ValueError(f"{path} is no tokenizer: {error}") from error


@suggest_keywords
def from_chats(
    records: Records,
    tokenizer: Any,
    *,
    client: str,
    length: int,
    template: str | Template = "chatml",
    too_long: str = "error",
    min_size: int = 1,
) -> FederatedArrays:
    """Pack the conversations of each client into rows, and put them on the device.

    ::

        tokenizer = data.load_tokenizer("qwen2-0.5b")
        clients = data.from_chats("chats.jsonl", tokenizer, client="user", length=512)
        loss_fn = models.answer_loss(model.apply)

    Args:
      records: a file of JSON lines; or an iterable of records, such as a ``Dataset`` of Hugging
        Face's ``datasets``.
      tokenizer: object with ``encode(text, add_special_tokens=False).ids``.
      client: field with the client's id, text or an integer.
      length, too_long: as in ``pack``.
      template: "chatml", "llama3", or a ``Template``. Its special tokens must be tokens of the
        tokenizer.
      min_size: smallest number of rows of a client.

    Returns:
      The clients in the order of their first occurrence, with their ids as ``names``; an example is
      a row.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not a JSON object; a record has none of the forms or lacks the field; or
        as in ``pack`` and ``from_clients``.
    """
    of_client: dict[str, list[Sentence]] = {}
    for where, record in _numbered(records):
        name = record.get(client)
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise ValueError(f"{where}: {client!r} is {name!r}; it must be text or an integer.")
        sentence = _sentence(where, record, tokenizer, template)
        of_client.setdefault(str(name), []).append(sentence)
    packed = {}
    for name, sentences in of_client.items():
        try:
            packed[name] = pack(sentences, length, too_long=too_long)
        except ValueError as error:
            raise ValueError(f"client {name!r}: {error}") from error
    return from_clients(packed, min_size=min_size)


@suggest_keywords
def pack_chats(
    records: Records,
    tokenizer: Any,
    *,
    length: int,
    template: str | Template = "chatml",
    too_long: str = "error",
) -> Examples:
    """Pack conversations without clients into rows, for example for evaluation.

    Args:
      records, tokenizer, length, template, too_long: as in ``from_chats``.

    Raises:
      FileNotFoundError, ValueError: as ``from_chats``.
    """
    sentences = [_sentence(w, record, tokenizer, template) for w, record in _numbered(records)]
    return pack(sentences, length, too_long=too_long)


def _numbered(records: Records) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (location for errors, record)."""
    if not isinstance(records, str | Path):
        for number, record in enumerate(records):
            if not isinstance(record, Mapping):
                raise ValueError(f"records[{number}] is a {type(record).__name__}; not a mapping.")
            yield f"records[{number}]", record
        return
    path = Path(records)
    if not path.is_file():
        raise FileNotFoundError(f"records is {str(path)!r}; there is no such file.")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: no JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}: a {type(record).__name__}; no object.")
            yield f"{path}, line {number}", record


def _sentence(
    where: str, record: Mapping[str, Any], tokenizer: Any, template: str | Template
) -> Sentence:
    """Tokenize a record; returns its tokens and which of them are scored."""
    if isinstance(template, str):
        template = TEMPLATES[check_choice("template", template, TEMPLATES)]
    if "text" in record and "messages" not in record:
        parts = [(template.start, False, True), (_text(where, "text", record["text"]), True, False)]
        parts.append((template.end, True, True))
    else:
        parts = [(template.start, False, True)]
        for number, (role, content) in enumerate(_messages(where, record)):
            answers = role == "assistant"
            gap = template.gap if number else ""
            parts.append((gap + template.before.replace("{role}", role), False, True))
            parts.append((content, answers, False))
            parts.append((template.end, answers, True))
        if not any(scored for _, scored, _ in parts):
            raise ValueError(f"{where}: the assistant says nothing.")
    tokens: list[int] = []
    flags: list[bool] = []
    for text, scored, is_mark in parts:
        found = _encode(tokenizer, text, is_mark)
        tokens += found
        flags += [scored] * len(found)
    return Sentence(tokens, flags)


def _encode(tokenizer: Any, text: str, is_mark: bool) -> list[int]:
    """Tokenize a part; special tokens inside messages stay text."""
    if not text:
        return []
    before = getattr(tokenizer, "encode_special_tokens", None)
    if before is None:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    tokenizer.encode_special_tokens = not is_mark
    try:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    finally:
        tokenizer.encode_special_tokens = before


def _messages(where: str, record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (role, content) of each message."""
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ValueError(f"{where}: messages is {messages!r}; it must be a list of messages.")
        found = []
        for message in messages:
            if not isinstance(message, Mapping) or message.get("role") not in ROLES:
                raise ValueError(
                    f"{where}: a message is {message!r}; it must have a role, one of "
                    f"{', '.join(ROLES)}, and a content."
                )
            found.append((message["role"], _text(where, "content", message.get("content"))))
        return found
    for question, answer in (
        ("instruction", "output"),
        ("prompt", "completion"),
        ("prompt", "response"),
    ):
        if question in record and answer in record:
            asked = _text(where, question, record[question])
            if question == "instruction" and record.get("input"):
                asked = f"{asked}\n\n{_text(where, 'input', record['input'])}"
            return [("user", asked), ("assistant", _text(where, answer, record[answer]))]
    raise ValueError(
        f"{where} has {sorted(map(str, record))}; it must have messages, instruction and output, "
        "prompt and completion or response, or text."
    )


def _text(where: str, field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {field} is {value!r}; it must be text.")
    return check_text(f"{where}: {field}", value)
