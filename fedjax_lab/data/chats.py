"""Chats and instructions: from records to the rows of each client.

``fedjax_lab.data.conversations`` says which forms a record may have. The assistant's messages and
the tokens that end them are scored, and all tokens of a plain text. An empty answer is the token
that ends it.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.checks import check_choice, errors_about
from fedjax_lab.data.clients import from_clients
from fedjax_lab.data.conversations import Records, messages_of, numbered
from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.packing import Sentence, pack
from fedjax_lab.data.sources import Examples
from fedjax_lab.machine.extras import imported
from fedjax_lab.signatures import suggest_keywords

_LIKE_SPECIAL = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_STAND_IN = "\u4dc0"  # a symbol that normalizers leave as it is


class Template(NamedTuple):
    """The text around messages.

    Attributes:
      start: text before a conversation.
      before: text before each message; "{role}" is replaced by the role.
      end: text after each message; it is scored if the message is.
      gap: text between messages.
      trim: whether white space around a message is removed, as some models' own templates do.
      plain: texts that look like special tokens, such as "<|user|>", and are none: the tokenizer
        may divide them. All others must be tokens of the tokenizer.
    """

    start: str
    before: str
    end: str
    gap: str
    trim: bool = False
    plain: tuple[str, ...] = ()


TEMPLATES = {
    "chatml": Template("", "<|im_start|>{role}\n", "<|im_end|>", "\n"),  # Qwen2 and others
    "llama3": Template(
        "<|begin_of_text|>",
        "<|start_header_id|>{role}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "",
        trim=True,
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
    kind = _tokenizer_class()
    path = Path(file)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    with errors_about(f"{path} is no tokenizer"):
        return kind.from_file(str(path))


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
      records: a file of JSON lines, a file that is one JSON array, or a .parquet file; or an
        iterable of records, such as a ``Dataset`` of Hugging Face's ``datasets``.
      tokenizer: a ``Tokenizer`` of the library ``tokenizers``, or a fast one of ``transformers``.
        Each conversation is tokenized in one piece, as ``apply_chat_template`` does; special tokens
        that a message contains stay text. Truncation and padding of the tokenizer are ignored.
      client: field with the client's id, text or an integer.
      length, too_long: as in ``pack``.
      template: "chatml", "llama3", or a ``Template``. Its special tokens must be tokens of the
        tokenizer. The default system prompt that some models' own templates add is not added.
      min_size: smallest number of rows of a client.

    A token that contains characters of a scored message and of the text before it is scored.

    Returns:
      The clients in the order of their first occurrence, with their ids as ``names``; an example is
      a row.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: ``tokenizer`` is of another kind.
      ValueError: a line is not a JSON object; a record has none of the forms, or more than one, or
        lacks the field; the tokenizer lacks special tokens of the template; or as in ``pack`` and
        ``from_clients``.
      ImportError: the package tokenizers, or pyarrow for a Parquet file, is missing.
    """
    encoder = _Encoder(tokenizer, template)
    of_client: dict[str, list[Sentence]] = {}
    for where, record in numbered(records):
        name = record.get(client)
        if isinstance(name, bool) or not isinstance(name, (str, Integral)):
            raise ValueError(f"{where}: {client!r} is {name!r}; it must be text or an integer.")
        of_client.setdefault(str(name), []).append(encoder.sentence(where, record))
    packed = {}
    for name, sentences in of_client.items():
        with errors_about(f"client {name!r}", ValueError):
            packed[name] = pack(sentences, length, too_long=too_long)
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
      FileNotFoundError, TypeError, ValueError, ImportError: as ``from_chats``.
    """
    encoder = _Encoder(tokenizer, template)
    sentences = [encoder.sentence(where, record) for where, record in numbered(records)]
    return pack(sentences, length, too_long=too_long)


class _Encoder:
    """Tokenizes conversations, each in one piece.

    What precedes a word decides its first token in many tokenizers, so the parts of a conversation
    cannot be tokenized one by one. Special tokens inside messages have to stay text: the copy of
    the tokenizer knows none. The template's own are written as stand-ins, tokens that are not
    special, and replaced afterwards.

    Args:
      tokenizer, template: as in ``from_chats``.
    """

    def __init__(self, tokenizer: Any, template: str | Template):
        if isinstance(template, str):
            template = TEMPLATES[check_choice("template", template, TEMPLATES)]
        if not isinstance(template, Template):
            raise TypeError(
                f"template is a {type(template).__name__}; it must be one of "
                f"{', '.join(TEMPLATES)}, or a data.Template."
            )
        self._template, self._tokenizer = template, _copied(tokenizer)
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token.content: (number, token) for number, token in added.items()}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._stand_ins: dict[str, str] = {}  # special token -> its stand-in
        self._marks_of: dict[str, int] = {}  # stand-in -> number of the special token

    def sentence(self, where: str, record: Mapping[str, Any]) -> Sentence:
        """Tokenize a record.

        Raises:
          ValueError: as ``from_chats``.
        """
        text = ""
        is_scored: list[bool] = []  # of each character
        marks: list[bool] = []  # of each special token of the template
        for written, scored, is_content in self._parts(where, record):
            if not is_content:
                written, count = self._with_stand_ins(written)
                marks += [scored] * count
            text += written
            is_scored += [scored] * len(written)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        # By their text: in a vocabulary with gaps, a new token may get the number of another. A
        # special token may include the white space beside it.
        named = [token.strip() for token in found.tokens]
        if typed := [token for token in named if token in self._stand_ins]:
            raise ValueError(
                f"{where}: a message contains {typed[0]!r}, which is a special token of the "
                "template, and which this tokenizer cannot encode as text."
            )
        places = [place for place, token in enumerate(named) if token in self._marks_of]
        if len(places) != len(marks):
            raise ValueError(
                f"{where}: the tokenizer finds {len(places)} of the {len(marks)} special tokens "
                "that the template writes; it does not keep them apart from the text around them."
            )
        tokens = np.array(found.ids, np.int64)
        before = np.cumsum([0, *is_scored])  # scored characters before each place
        starts, ends = np.array(found.offsets, np.int64).reshape(-1, 2).T
        flags = before[np.clip(ends, starts + 1, len(text))] > before[starts]
        tokens[places] = [self._marks_of[named[place]] for place in places]
        flags[places] = marks
        if not flags[1:].any():
            raise ValueError(f"{where}: the assistant says nothing that is scored.")
        return Sentence(tokens, flags)

    def _parts(self, where: str, record: Mapping[str, Any]) -> Iterator[tuple[str, bool, bool]]:
        """Yield the parts of a conversation: (text, whether it is scored, whether it is a content).

        What is no content is text of the template, which may have special tokens.
        """
        template, gap = self._template, ""
        yield template.start, False, False
        for role, content, scored in messages_of(where, record):
            if role:
                yield gap + template.before.replace("{role}", role), False, False
                content = content.strip() if template.trim else content
            yield content, scored, True
            yield template.end, scored, False
            gap = template.gap

    def _with_stand_ins(self, text: str) -> tuple[str, int]:
        """Replace special tokens of the template by stand-ins; also count them."""
        rest = self._special.sub("\n", text)
        for plain in self._template.plain:
            rest = rest.replace(plain, "\n")
        if missing := list(dict.fromkeys(_LIKE_SPECIAL.findall(rest))):
            raise ValueError(
                f"template has {', '.join(map(repr, missing))}, which the tokenizer does not have "
                "as tokens. Choose the template of the tokenizer's model; or name what is plain "
                "text in data.Template(..., plain=...)."
            )
        return self._special.subn(lambda mark: self._stand_in(mark[0]), text)

    def _stand_in(self, mark: str) -> str:
        if mark not in self._stand_ins:
            from tokenizers import AddedToken

            number, token = self._added[mark]
            new = _STAND_IN * 3 + chr(ord(_STAND_IN) + 1 + len(self._stand_ins))
            alike = AddedToken(
                new,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=False,
            )
            self._tokenizer.add_tokens([alike])
            self._stand_ins[mark] = new
            self._marks_of[new] = number
        return self._stand_ins[mark]


def _tokenizer_class() -> Any:
    needs = "a tokenizer needs the package tokenizers"
    return imported("tokenizers", needs, "pretrained").Tokenizer


def _copied(tokenizer: Any) -> Any:
    """Copy a tokenizer, without truncation, padding and trimmed offsets."""
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)  # of transformers
    inner = getattr(inner, "_tokenizer", inner)  # of tokenizers' ready-made classes
    if not isinstance(inner, _tokenizer_class()):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}; it must be a Tokenizer of the library "
            "tokenizers, such as data.load_tokenizer reads, or a fast tokenizer of transformers."
        )
    found = copy.deepcopy(inner)
    found.no_truncation()
    found.no_padding()
    found.post_processor = None
    return found
