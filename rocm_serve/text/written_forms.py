"""The forms in which models write function calls and reasoning: one row for each, and no code for any.

A pattern is the text that a model writes, with holes. Blanks may be more or fewer than the pattern has.

{name}        the function's name
{json}        its arguments, as a JSON object
{call:KEY}    a JSON object with "name" and, under KEY, the arguments
{calls:KEY}   a JSON list of such objects
{python}      a Python list of calls with keywords
{parameters}  any number of parameters, each by the row's other pattern with {key}, {value} and {kind}, which is "true"
              for a text and "false" for JSON
{maybe:TEXT}  a text that a model may leave out
{any:TEXT}    a short text without meaning; TEXT is one that serves, or a regular expression of such ones
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from rocm_attn.machine.choices import AUTO

# A mark that a tokenizer may have as one token.
MARK = re.compile(r"</?[^<>\s=]+>|\[/?[A-Z_]+\]")

HOLE = re.compile(r"\{(\w+)(?::([^}]*))?\}")
# Most characters of a name, a key, or a text without meaning. A model that writes more does not write a call.
MOST_SHORT = 256


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family of models writes calls.

    names:     by which users choose it; they are those of vLLM and SGLang, if these have one
    opens:     marks that begin calls, the usual one first; a model may leave it out where a call has a mark of its own.
               "": an answer is calls from its first character on, or text
    call:      the pattern of a call
    closes:    the mark that ends calls; a model may leave it out at the end
    parameter: the pattern of a parameter, for {parameters}
    is_list:   whether several calls may come between the marks; otherwise each has its own
    is_only:   whether nothing may follow a required call, not even another one
    call_id:   ids of earlier calls, if templates of these models demand a form: with {name}, the {number} of the call
               in the conversation, and {nine}, an id of nine letters and digits; "": they take any
    """

    names: tuple[str, ...]
    opens: tuple[str, ...]
    call: str
    closes: str = ""
    parameter: str = ""
    is_list: bool = False
    is_only: bool = False
    call_id: str = ""

    @property
    def texts(self) -> str:
        """All that it writes, except for what is in holes."""
        return " ".join((*self.opens, self.call, self.closes, self.parameter))

    @property
    def own_mark(self) -> str:
        """The mark that each call itself begins with; "" if there is none."""
        return self.call.partition("{")[0]

    @property
    def own_end(self) -> str:
        """The mark that each call itself ends with, without blanks around it; "" if there is none."""
        return self.call.rpartition("}")[2].strip()

    @property
    def parameter_marks(self) -> tuple[str, str]:
        """The marks that a parameter begins and ends with, without blanks around them."""
        return self.parameter.partition("{")[0].strip(), self.parameter.rpartition("}")[2].strip()

    @property
    def begins(self) -> tuple[str, ...]:
        """All marks that a call may begin with, without blanks around them; its own mark is the last one."""
        return tuple(mark for mark in (*map(str.strip, self.opens), self.own_mark) if mark)


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """How a family of models writes its reasoning, which comes before the rest of an answer.

    names:   see CallForm
    opens:   the mark before it. A chat template may write it at the prompt's end: an answer then begins inside
    closes:  the mark after it
    shown:   texts in the templates of these models, by which they are known
    resumes: what comes between the reasoning and the rest
    answers: what comes before a text, if that is marked as well
    implies: marks that end the reasoning too, and are no part of it
    drops:   further marks that are no part of a text
    """

    names: tuple[str, ...]
    opens: str
    closes: str
    shown: tuple[str, ...]
    resumes: str = ""
    answers: str = ""
    implies: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()

    @property
    def texts(self) -> str:
        """All that it writes."""
        return " ".join((self.opens, self.closes, self.resumes, self.answers, *self.implies, *self.drops))


# The call that a template writes shows the model's form; the first row that fits is used. Each row names the models and
# the text that was read for it, which is public code that quotes or replaces the models' own templates: vLLM's
# examples/tool_chat_template_*.jinja and docs/features/tool_calling.md, SGLang's srt/function_call and srt/parser.
CALL_FORMS = (
    # Hermes 2 Pro and later, Qwen 2.5: vLLM's tool_chat_template_hermes.jinja, SGLang's qwen25_detector.py
    CallForm(("hermes", "qwen", "qwen25"), ("<tool_call>\n",), "{call:arguments}", "\n</tool_call>"),
    # Qwen3-Coder: vLLM's tool_chat_template_qwen3coder.jinja, SGLang's qwen3_coder_detector.py
    CallForm(
        ("qwen3_coder", "qwen3_xml"),
        ("<tool_call>\n",),
        "<function={name}>\n{parameters}</function>\n",
        "</tool_call>",
        "<parameter={key}>\n{value}\n</parameter>\n",
        is_list=True,
    ),
    # GLM-4.5 and 4.6: SGLang's glm4_moe_detector.py. GLM-4.7 and 5, without new lines: its glm47_moe_detector.py
    CallForm(
        ("glm45", "glm47"),
        ("<tool_call>",),
        "{name}\n{parameters}</tool_call>",
        "",
        "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    # MiniMax-M2: SGLang's minimax_m2.py
    CallForm(
        ("minimax_m2", "minimax-m2"),
        ("<minimax:tool_call>\n",),
        '<invoke name="{name}">\n{parameters}</invoke>\n',
        "</minimax:tool_call>",
        '<parameter name="{key}">{value}</parameter>\n',
        is_list=True,
    ),
    # Kimi-K2: SGLang's kimik2_detector.py, after docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct
    CallForm(
        ("kimi_k2",),
        ("<|tool_calls_section_begin|>",),
        "<|tool_call_begin|>{maybe:functions.}{name}:{any:/[0-9]+/}<|tool_call_argument_begin|>{json}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        is_list=True,
        call_id="functions.{name}:{number}",
    ),
    # DeepSeek-V3-0324 and R1-0528: vLLM's tool_chat_template_deepseekv3.jinja
    CallForm(
        ("deepseek_v3", "deepseekv3"),
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        is_list=True,
    ),
    # DeepSeek-V3.1: vLLM's tool_chat_template_deepseekv31.jinja. SGLang's documentation names V3.2-Exp too
    CallForm(
        ("deepseek_v31", "deepseekv31"),
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        is_list=True,
    ),
    # DeepSeek-V3.2: SGLang's deepseekv32_detector.py, which also reads JSON in the place of parameters
    CallForm(
        ("deepseek_v32", "deepseekv32"),
        ("<｜DSML｜function_calls>\n",),
        '<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n',
        "</｜DSML｜function_calls>",
        '<｜DSML｜parameter name="{key}" string="{kind}">{value}</｜DSML｜parameter>\n',
        is_list=True,
    ),
    # Mistral's tokenizers from version 11 on: InstructTokenizerV11 and V13 of mistral_common. V11 writes an id between
    # name and arguments
    CallForm(("mistral",), ("[TOOL_CALLS]",), "{name}{any:}[ARGS]{json}", call_id="{nine}"),
    # Mistral-7B-Instruct-v0.3 and others with an older tokenizer: vLLM's mistral_tool_parser.py
    CallForm(("mistral_v3",), ("[TOOL_CALLS]",), "{calls:arguments}", call_id="{nine}"),
    # gpt-oss: docs/format.md of openai/harmony; the recipient comes in the role or in the channel
    CallForm(
        ("openai", "gpt-oss"),
        ("<|channel|>commentary to=functions.", "<|channel|>analysis to=functions.", "to=functions."),
        "{name}{any: <|constrain|>json}<|message|>{json}",
        "<|call|>",
        is_only=True,
    ),
    # Llama 3.1: vLLM's tool_chat_template_llama3.1_json.jinja; the mark: SGLang's llama32_detector.py
    CallForm(("llama3_json", "llama3"), ("", "<|python_tag|>"), "{call:parameters}", is_only=True),
    # LFM2 and LFM2.5: vLLM's lfm2_tool_parser.py, SGLang's lfm2_detector.py
    CallForm(("lfm2",), ("<|tool_call_start|>",), "{python}", "<|tool_call_end|>"),
    # Llama 4: vLLM's tool_chat_template_llama4_pythonic.jinja and llama4_pythonic_tool_parser.py. Llama 3.2: its
    # documentation
    CallForm(("pythonic", "llama4_pythonic"), ("", "<|python_start|>"), "{python}", "<|python_end|>", is_only=True),
)

REASONING_FORMS = (
    # Kimi-K2, whose calls end its reasoning: vLLM's kimi_k2_reasoning_parser.py
    ReasoningForm(
        ("kimi_k2",),
        "<think>",
        "</think>",
        shown=("</think>", "<|tool_calls_section_begin|>"),
        implies=("<|tool_calls_section_begin|>",),
    ),
    # Qwen 3, and Qwen 3.5, which may call before it ends its reasoning: vLLM's qwen3_reasoning_parser.py. A thought
    # about <tool_call> does not end it
    ReasoningForm(
        ("qwen3",),
        "<think>",
        "</think>",
        shown=("</think>", "<function="),
        implies=("<tool_call>\n<function=",),
    ),
    # GLM-4.5, whose calls end its reasoning: SGLang's reasoning_parser.py
    ReasoningForm(("glm45",), "<think>", "</think>", shown=("</think>", "<arg_key>"), implies=("<tool_call>",)),
    # DeepSeek-R1: SGLang's reasoning_parser.py. DeepSeek-V3.1: its template above. MiniMax-M2: vLLM's
    # minimax_m2_parser.py, by which it writes the end alone
    ReasoningForm(
        ("think", "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "minimax_m2"),
        "<think>",
        "</think>",
        shown=("</think>",),
    ),
    # Magistral: vLLM's mistral_reasoning_parser.py
    ReasoningForm(("mistral",), "[THINK]", "[/THINK]", shown=("[/THINK]",)),
    # see the calls of gpt-oss
    ReasoningForm(
        ("openai_gptoss", "gpt-oss"),
        "<|channel|>analysis<|message|>",
        "<|end|>",
        shown=("<|channel|>",),
        resumes="<|start|>assistant",
        answers="<|channel|>final<|message|>",
        drops=(
            *(f"<|channel|>final{json}<|message|>" for json in (" <|constrain|>json", "<|constrain|>json", " json")),
            "<|channel|>commentary<|message|>",
            "<|end|>",
            "<|return|>",
        ),
    ),
)
NONE = "none"


def filled(pattern: str, text: Callable[[str], str], holes: Mapping[str, Callable[[str], str]]) -> str:
    """Returns a pattern with its texts converted and its holes filled. A hole's function gets its word, or ""."""
    parts = HOLE.split(pattern)
    found = [text(parts[0])]
    for hole, word, after in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        found += [holes[hole](word or ""), text(after)]
    return "".join(found)


_Form = TypeVar("_Form", bound=CallForm | ReasoningForm)


def form_named(name: str, forms: Iterable[_Form]) -> _Form:
    """Returns the row of a name. Raises LookupError, with the names that are nearest to it."""
    rows = {each: form for form in forms for each in form.names}
    if name not in rows:
        near = difflib.get_close_matches(name, rows, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose {AUTO}, {NONE}, {', '.join(sorted(rows))}"
        raise LookupError(hint)
    return rows[name]


def require_form(name: str, forms: Iterable[CallForm | ReasoningForm]) -> None:
    """Raises LookupError for a name that is neither a row's nor AUTO nor NONE, with the nearest names."""
    if name not in (AUTO, NONE):
        form_named(name, forms)


def kept_marks(added: Collection[str]) -> frozenset[str]:
    """Returns the marks that are part of a model's text, although its files may call them special.

    added: the tokens that its tokenizer has beyond the vocabulary of texts. A form counts if its first mark is there
    """
    marks = [MARK.findall(form.texts) for form in (*CALL_FORMS, *REASONING_FORMS)]
    return frozenset(mark for found in marks if found and found[0] in added for mark in found)
