"""AnswerReader: finds reasoning and function calls in a text that comes in pieces, by rows of written_forms.py."""

import re
import secrets
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from rocm_serve.server.call_arguments import from_object, from_parameters, from_python, properties_of
from rocm_serve.text.written_forms import HOLE, MOST_SHORT, CallForm, ReasoningForm

_NAME = re.compile(r"[A-Za-z0-9_-]*")
_BLANKS = re.compile(r"\s*")
# Keys of a function's parameters that a pattern has: it would hold the event loop up for a client's million of them.
_MOST_KEYS = 128
# Calls that are begun and given up within a value. Each further one would be read once more.
_MOST_DEPTH = 8


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asks for. arguments: as JSON"""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of a model's reasoning."""

    text: str


Part = str | ToolCall | Thought


class Reader:
    """Reads the text of one choice, which has no parts but text."""

    def push(self, text: str) -> list[Part]:
        """Takes the next text, and returns the parts that are decided now and were not returned yet."""
        return [text] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Returns the rest. The text has ended. is_cut: whether the model would have gone on"""
        return []


# A step waits, by yielding, whenever the text so far does not decide. So its result does not depend on the pieces.
_Waits = Generator[None, None, bool]
_Found = dict[str, Any]


class AnswerReader(Reader):
    """The reader of a choice that may have reasoning or calls.

    Anything but reasoning and complete calls of known functions stays text, so nothing that a model writes is lost.
    Text that may become a call is held back until that is decided. Blanks around calls and reasoning are dropped.

    calls:     the form of calls; None if there may be none
    functions: name of a function -> the schema of its parameters
    reasoning: the form of reasoning; None if the model writes none
    is_inside: whether the prompt ends inside of reasoning
    several:   whether more calls than the first are returned; others are left out
    """

    def __init__(
        self,
        calls: CallForm | None,
        functions: Mapping[str, Mapping[str, Any]],
        reasoning: ReasoningForm | None = None,
        *,
        is_inside: bool = False,
        several: bool = True,
    ) -> None:
        self._calls, self._functions, self._reasoning, self._is_inside = calls, functions, reasoning, is_inside
        self._several = several
        self._held, self._at = "", 0  # text that was not returned yet, and how much of it was read
        self._has_ended = self._is_cut = self._has_called = False
        self._is_fresh = True  # nothing but blanks came since the beginning, or since the last mark
        self._has_mark = self._has_said = False
        self._joint = ""  # what stands for the marks between two texts
        self._parts: list[Part] = []
        self._steps = self._read()

    def push(self, text: str) -> list[Part]:
        self._held += text
        return self._run()

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        self._has_ended, self._is_cut = True, is_cut
        return self._run()

    def _run(self) -> list[Part]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    @cached_property
    def _marks(self) -> dict[str, str]:
        """Each mark that may come in a text, and what it does."""
        marks: dict[str, str] = {}
        if self._calls is not None:  # Qwen3-Coder and others may leave out the mark before a call
            own = self._calls.own_mark
            marks = {mark: "call" if mark == own else "calls" for mark in self._calls.begins}
        if self._reasoning is not None:
            form = self._reasoning
            marks |= {form.opens: "reasoning"} | dict.fromkeys((form.resumes, form.answers, *form.drops), "drop")
        return {mark: does for mark, does in marks.items() if mark}

    @property
    def _form(self) -> CallForm:
        assert self._calls is not None, "a call is read"
        return self._calls

    def _read(self) -> Generator[None, None, None]:
        if self._is_inside:
            yield from self._think(again=True)
        is_bare = self._calls is not None and "" in self._calls.opens
        while True:
            if is_bare and self._is_fresh:
                if self._has_called:  # Llama writes several so, or on lines of their own
                    if (yield from self._literal(";")):
                        self._drop(self._at)
                    has_comma = yield from self._literal(",")
                    self._drop(self._blanks_end(0))
                    self._at = int(has_comma)
                if (yield from self._section()):
                    continue
            mark = yield from self._next(self._marks, as_thought=False)
            if not mark:
                self._tell(len(self._held))
                return
            does = self._marks[mark]
            if does in ("call", "calls"):
                self._at += len(mark) if does == "calls" else 0
                yield from self._section()
            elif does == "drop" or self._is_fresh:
                self._drop(self._at + len(mark))
                self._joint = "\n" if self._has_said else ""
                if does == "reasoning":
                    yield from self._think(again=False)
            else:  # a mark that begins or ends reasoning within a text is a text about it
                self._tell(self._at + len(mark))

    def _think(self, *, again: bool) -> Generator[None, None, None]:
        """Reads reasoning to its end. again: the model may repeat the mark that the prompt ends with"""
        form = self._reasoning
        assert form is not None
        if again and (yield from self._literal(form.opens)):
            self._drop(self._at)
        self._is_fresh = self._has_mark = True
        opens = self._calls.opens[0].strip() if self._calls is not None else ""
        implies = [mark for mark in form.implies if opens and mark.startswith(opens)]
        while (mark := (yield from self._next((form.closes, *implies), as_thought=True))) in implies:
            self._at += len(opens)
            if (yield from self._section(form.closes)):
                self._marks[form.closes] = "end"  # a model may still end what its call has ended
                return
        self._drop(self._at + len(mark) if mark else len(self._held))

    def _next(self, marks: Mapping[str, str] | tuple[str, ...], *, as_thought: bool) -> Generator[None, None, str]:
        """Returns the next mark, where _at is then, or "" at the end. Passes on the text before it, without blanks."""
        pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
        longest = max(map(len, marks), default=0)
        while True:
            if self._has_mark and self._is_fresh and (as_thought or not self._has_said):
                self._drop(self._blanks_end(0), stays_fresh=True)
            found = pattern.search(self._held)
            end = found.start() if found else self._where_one_may_begin(marks, longest)
            known = len(self._held[:end].rstrip())
            self._tell(known, as_thought=as_thought)
            if found:
                self._at = end - known
                return found.group()
            if self._has_ended:
                return ""
            yield

    def _where_one_may_begin(self, marks: Mapping[str, str] | tuple[str, ...], longest: int) -> int:
        for begin in range(max(0, len(self._held) - longest + 1), len(self._held)):
            if any(mark.startswith(self._held[begin:]) for mark in marks):
                return begin
        return len(self._held)

    def _tell(self, end: int, *, as_thought: bool = False) -> None:
        """Returns the held text up to a place as what it is, not as a call."""
        text, self._held, self._at = self._held[:end], self._held[end:], 0
        if text and not (self._has_called and text.isspace()):
            self._parts.append(Thought(text) if as_thought else self._joint + text)
            self._is_fresh = False
            if not as_thought:
                self._has_said, self._joint = True, ""

    def _drop(self, end: int, *, stays_fresh: bool = False) -> None:
        self._held, self._at = self._held[end:], 0
        if not stays_fresh:
            self._is_fresh = self._has_mark = True

    def _section(self, ends: str = "") -> _Waits:
        """Reads calls, from where _at is. If there is none, what was read is text, and the result is False.

        ends: the mark that ends the thought in which they come, if they do; what was read before it is a thought then
        """
        form, goes_on, has_called = self._form, True, False
        is_opened = self._held[: self._at].strip()
        while goes_on:
            found: _Found = {}
            is_read = yield from self._pattern(form.call, found)
            # Qwen3-Coder and others may leave out the mark after a call, before the end of all or another one.
            follow = (form.closes, *form.begins) if found.get("parameters") or "json" in found else ()
            if found.get("parameters") == [] and is_opened:
                follow = (form.closes,)
            for mark in filter(None, follow):
                end = self._at
                is_read, self._at = is_read or (yield from self._literal(mark)), end
            calls = self._made(found) if is_read else []
            if not calls:
                # At the end all of the rest is text, unless the model began anew: each further mark would make it be
                # read once more.
                goes_on = not self._has_ended or self._held[self._at :].lstrip().startswith(form.begins)
                end, is_thought = self._at if goes_on else len(self._held), bool(ends) and not has_called
                place = self._held.find(ends, 0, end) if is_thought else -1
                self._tell(place if place >= 0 else end, as_thought=is_thought)
                return has_called
            self._parts += calls if self._several else [] if self._has_called else calls[:1]
            self._has_called = has_called = True
            self._drop(self._at)
            is_closed = yield from self._literal(form.closes)
            self._drop(self._at)
            goes_on = form.is_list and not is_closed
        return True

    def _made(self, found: _Found) -> list[Part]:
        """Returns the calls of what was found in a pattern; none if one of them is none."""
        if "parameters" in found:
            found["json"] = from_parameters(found["parameters"], self._functions[found["name"]])
        made = found["made"] if "made" in found else [(found["name"], found["json"])]
        known = all(name in self._functions for name, _ in made)
        return [ToolCall(name, arguments) for name, arguments in made] if known else []

    def _pattern(self, pattern: str, found: _Found) -> _Waits:
        """Reads a pattern, and puts into `found` what is in its holes. _at goes as far as the text fits."""
        parts = HOLE.split(pattern)  # texts, and between two of them a hole's name and its word
        for place in range(0, len(parts), 3):
            if place:
                hole, word = parts[place - 2], parts[place - 1]
                if not (yield from self._hole(hole, word or "", parts[place], found)):
                    return False
            if not (yield from self._literal(parts[place])):
                return False
        return True

    def _hole(self, hole: str, word: str, after: str, found: _Found) -> _Waits:
        if hole == "name":
            return (yield from self._name(found))
        if hole == "parameters":
            return (yield from self._parameters(found))
        if hole == "maybe":
            return (yield from self._literal(word)) or True
        if hole in ("key", "kind", "any"):
            (end,) = after.split()[:1]
            begin = self._at
            found[hole] = yield from self._until(end)
            return found[hole] is not None and not self._has_begun_anew(begin, self._at + len(end))
        opens = {"calls": "[", "python": "["}.get(hole, "{")
        if not (yield from self._literal(opens)):
            return False
        begin = self._at - 1
        brackets = _Brackets(self._at, "\"'" if hole == "python" else '"', self._form.begins)
        while (end_of := brackets.end_in(self._held)) < 0:
            if self._held.startswith(self._form.begins, brackets.seen):
                self._at = len(self._held[: brackets.seen].rstrip())
                return False
            if self._has_ended:
                return False
            yield
        self._at = end_of
        text = self._held[begin:end_of]
        made = from_python(text) if hole == "python" else from_object(text, hole, word)
        if made is not None:
            found["json" if hole == "json" else "made"] = made
        return made is not None

    def _name(self, found: _Found) -> _Waits:
        while (end := _end(_NAME, self._held, begin := self._blanks_end(self._at))) == len(self._held):
            if self._has_ended or end - begin >= MOST_SHORT:
                break
            yield
        found["name"], self._at = self._held[begin:end], end
        return found["name"] in self._functions

    def _parameters(self, found: _Found) -> _Waits:
        pairs: list[tuple[str, str, str]] = []
        given: set[str] = set()
        unclosed = 0
        before, after = self._form.parameter_marks
        head, _, closes = self._form.parameter.removeprefix(before).partition("{value}")
        marks = self._marks_after_a_value(found["name"])
        while (yield from self._literal(before)):
            one: _Found = {}
            if not (yield from self._pattern(head, one)):
                return False
            begin = self._at
            given.add(one["key"].strip())
            mark = yield from self._end_of_value(marks, given)
            if mark is None:
                return False
            value, self._at = self._held[begin : mark.start()], mark.end() if mark[1] else mark.start()
            # A mark too many closes what an earlier value left open: that value quotes parameters.
            opened = value.count(before) - value.count(after) + (not mark[1])
            if opened < 0 < unclosed:
                return False
            unclosed += opened
            if not mark[1]:
                value = value.rstrip()
            if head.endswith("\n") and closes.startswith("\n"):  # one new line is the form's, not the value's
                value = value.removeprefix("\n").removesuffix("\n")
            pairs.append((one["key"].strip(), value, one.get("kind", "")))
        # A mark that comes later, and that nothing opens, is that of a value which went on.
        if unclosed > 0 and (yield from self._closes_after(self._at, ())):
            return False
        found["parameters"] = pairs
        return True

    def _end_of_value(self, marks: re.Pattern[str], given: set[str]) -> Generator[None, None, re.Match[str] | None]:
        """Returns what ends the value that begins where _at is; None if nothing does.

        marks: _marks_after_a_value(); given: keys that the call has, as a parameter with one of them is text
        """
        ends = self._form.closes or self._form.begins[0]  # the text's end may stand for it
        unopened, has_own = self._at, False
        while (mark := (yield from self._search(marks, unopened, ends))) is not None:
            if mark[3]:
                own = yield from self._paired(unopened, mark)
                if own is not None or mark[4] or self._is_cut:
                    return own
                unopened = mark.end()  # a text about calls: there is no such function
                continue
            goes_on = mark[2] or (mark[1] and (yield from self._goes_on(mark, is_strict=has_own)))
            others = self._form.begins if mark[1] else ()
            is_text = not goes_on and (yield from self._closes_after(mark.end(), others))
            if not (mark[1] or is_text) and self._has_begun_anew(unopened, mark.start()):
                return None
            if not is_text and mark[2] not in given:
                return None if has_own and not goes_on else mark
            unopened, has_own = mark.end(), has_own or bool(mark[1])
        return None

    def _paired(self, begin: int, call: re.Match[str]) -> Generator[None, None, re.Match[str] | None]:
        """Returns the mark that closes a value with a call in it, which has marks of its own.

        None if no mark is left for the value: the model has begun anew, or the text is cut within the value and no call
        of it is one. begin: where the call, or its mark, may begin
        """
        before, closes = map(re.escape, self._form.parameter_marks)
        either, at, depth = re.compile(f"({closes})|{before}"), call.start(), 0
        while depth < _MOST_DEPTH and (mark := (yield from self._search(either, at))) is not None:
            if mark[1] and not depth:
                return mark
            at, depth = mark.end(), depth + (-1 if mark[1] else 1)
        ends = self._form.own_end, self._form.closes.strip() or self._form.begins[0]
        if call[4]:
            self._has_begun_anew(begin, call.end())
        if self._is_cut or (depth < _MOST_DEPTH and not self._held.rstrip().endswith(ends)):
            self._at = len(self._held)
        return None

    def _goes_on(self, closes: re.Match[str], *, is_strict: bool) -> _Waits:
        """True if a call goes on, or ends, after a mark that closes a value.

        is_strict: whether nothing may be left out, as the value has such marks as text
        """
        form, self._at = self._form, closes.end()
        may_come = (closes[1], form.closes, *form.begins)
        for mark in (form.parameter_marks[0], form.own_end, *(() if is_strict else may_come)):
            if mark and (yield from self._literal(mark)):
                return True
        return False

    def _closes_after(self, at: int, others: tuple[str, ...]) -> _Waits:
        """True if a mark before `at` is text of a value, whose own mark comes before another parameter, or may."""
        before, closes = self._form.parameter_marks
        either = re.compile(f"({re.escape(closes)})|{'|'.join(map(re.escape, (before, *others)))}")
        found = yield from self._search(either, at)
        return self._is_cut if found is None else found[1] is not None

    def _search(self, marks: re.Pattern[str], at: int, ends: str = "") -> Generator[None, None, re.Match[str] | None]:
        """Returns the next mark from `at` on; None if none comes. ends: a text that the text's end stands for"""
        while (found := marks.search(self._held + (ends if self._has_ended else ""), at)) is None:
            if self._has_ended:
                return None
            at = max(at, len(self._held) - 2 * MOST_SHORT)  # longer than any mark
            yield
        return found

    def _has_begun_anew(self, begin: int, end: int) -> bool:
        """Returns whether another call begins in a part of a call, which is none then. _at is before that other one."""
        places = (self._held.rfind(each, begin, end) for each in self._form.begins)
        if (place := next((each for each in places if each >= 0), -1)) >= 0:
            self._at = len(self._held[:place].rstrip())
        return place >= 0

    def _marks_after_a_value(self, name: str) -> re.Pattern[str]:
        """Finds the mark that closes a value of a function's parameter, which is group 1, and else what follows it.

        Qwen3-Coder and others may leave the mark out before another parameter, whose key is group 2, or the end of a
        call. Group 3 is the mark of another call with a parameter, and group 4 its function, if that is known.
        """
        form = self._form
        before, closes = map(re.escape, form.parameter_marks)
        keys = [key for key in islice(properties_of(self._functions[name]), _MOST_KEYS) if len(key) <= MOST_SHORT]
        follow = [mark for mark in (form.closes.strip(), *form.begins) if mark]
        begins = f"{before}({'|'.join(map(re.escape, keys)) or '(?!)'})"
        begins += r"\s{0,8}".join(map(re.escape, HOLE.split(form.parameter)[3].split()))
        names = rf"(?:({'|'.join(map(re.escape, islice(self._functions, _MOST_KEYS)))})|[^\s<>\"]{{1,{MOST_SHORT}}})"
        words = [f"({re.escape(form.begins[-1])})", names, *map(re.escape, HOLE.split(form.call)[3].split()), before]
        call = r"\s{0,8}".join(words)
        return re.compile(
            rf"({closes})|{begins}|{re.escape(form.own_end)}\s{{0,8}}(?:{'|'.join(map(re.escape, follow))})|{call}"
        )

    def _literal(self, text: str) -> _Waits:
        """Reads a text, with any number of blanks before each of its words. _at stays if something else comes."""
        at = self._at
        for word in text.split():
            while (at := self._blanks_end(at)) == len(self._held) or (
                len(self._held) - at < len(word) and word.startswith(self._held[at:])
            ):
                if self._has_ended:
                    return False
                yield
            if not self._held.startswith(word, at):
                return False
            at += len(word)
        self._at = at
        return True

    def _until(self, mark: str) -> Generator[None, None, str | None]:
        """Returns the short text before a mark, where _at is then; None if it does not come."""
        begin, most = self._at, self._at + MOST_SHORT + len(mark)
        while (end := self._held.find(mark, begin, most)) < 0:
            if self._has_ended or len(self._held) >= most:
                return None
            yield
        self._at = end
        return self._held[begin:end]

    def _blanks_end(self, at: int) -> int:
        return _end(_BLANKS, self._held, at)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


class _Brackets:
    """Finds the closing bracket in a growing text. It looks at each character once.

    seen:   the place after the opening bracket; then where the text ends, or a mark begins that is in no text
    quotes: characters that begin and end texts
    begins: marks of calls. A text in other quotes may have them
    """

    def __init__(self, seen: int, quotes: str, begins: tuple[str, ...]) -> None:
        self.seen, self._quotes, self._begins, self._depth = seen, quotes, begins, 1
        self._quote, self._is_escaped, self._firsts = "", False, {mark[0] for mark in begins}

    def end_in(self, text: str) -> int:
        """Returns the place after the bracket, or -1 if it has not come. text: extends the last one"""
        for place in range(self.seen, len(text)):
            self.seen, character = place, text[place]
            if self._quote:
                if character == self._quote and not self._is_escaped:
                    self._quote = ""
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character in self._quotes:
                self._quote = character
            elif character in self._firsts and any(
                each.startswith(text[place : place + len(each)]) for each in self._begins
            ):
                return -1
            elif character == "'":
                self._firsts = set()
            elif character in "{[(":
                self._depth += 1
            elif character in "}])":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        self.seen = len(text)
        return -1
