"""Conversations token by token: sampled tokens are kept, and all others come from the chat template."""

import numpy as np
import pytest
from plasmid import Completion, StopReason
from plasmid.errors import TemplateError
from plasmid_workflows.transcript import Transcript

HEADS = "{% for m in messages %}{{ '<|h|>' + m.role + '<|/h|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
LLAMA = "{{ '<|b|>' }}" + HEADS + "{% if add_generation_prompt %}<|h|>assistant<|/h|>\n\n{% endif %}"
GEMMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|h|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<|eot|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|h|>model\n{% endif %}"
)
FORGETFUL = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|h|>' + m.role + '\n' + c + '<|eot|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MOVES = (
    "{% for m in messages %}{% if loop.last and m.role == 'user' %}(rules){% endif %}"
    "{{ '<|h|>' + m.role + '\n' + m.content + '<|eot|>' }}{% endfor %}"
)
SILENT = LLAMA.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
CALLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result needs a call') }}{% endif %}{{ '<|h|>result\n' + m.content + '<|eot|>' }}"
    "{% elif m.tool_calls %}{{ '<|h|>assistant\n' + m.tool_calls[0].function.name + '<|call|>' }}"
    "{% else %}{{ '<|h|>' + m.role + '\n' + m.content + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant\n{% endif %}"
)
SPECIAL = ("<|b|>", "<|h|>", "<|/h|>", "<|eot|>", "<|eom|>", "<|call|>", "<|user|>", "<|assistant|>", "<|tool|>")
ASKED = [{"role": "user", "content": "2+2?"}]
MORE = [{"role": "user", "content": "and 3+3?"}]
RESULT = [{"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "4"}]


@pytest.fixture(scope="module")
def tokenizer_of(make_character_tokenizer):
    return lambda template: make_character_tokenizer(template, special=SPECIAL, eos="<|eot|>")


def drawn(tokenizer, text, stop=StopReason.STOP):
    ids = tokenizer.encode(text)
    return Completion(
        request_id="r", token_ids=ids, logprobs=np.full(len(ids), -1.0, np.float32), versions=(), stop_reason=stop
    )


def after(tokenizer, said, messages, stop=StopReason.STOP, **settings):
    """Return the tokens that are appended after a turn."""
    transcript = Transcript.of_messages(tokenizer, ASKED, **settings)
    transcript.append(drawn(tokenizer, said, stop))
    before = transcript.token_ids
    added = transcript.add(messages)
    assert transcript.token_ids.tolist() == [*before, *added] and transcript.num_tokens == len(before) + len(added)
    return tokenizer.decode(added, keep_special=True)


@pytest.mark.parametrize("template", [LLAMA, GEMMA, FORGETFUL, NO_END], ids=["llama", "gemma", "forgetful", "no-end"])
def test_a_conversation_has_the_tokens_that_the_template_gives_it_as_a_whole(tokenizer_of, template):
    tokenizer = tokenizer_of(template)
    transcript = Transcript.of_messages(tokenizer, ASKED)
    messages, end = list(ASKED), "" if template is NO_END else "<|eot|>"
    for number in range(4):
        transcript.append(drawn(tokenizer, f"it is {number}{end}", StopReason.STOP if end else StopReason.LENGTH))
        transcript.add(MORE)
        messages += [{"role": "assistant", "content": f"it is {number}"}, *MORE]
    whole, _ = tokenizer.encode_prompt(messages, {})
    assert transcript.token_ids.tolist() == whole.tolist()


def test_sampled_tokens_are_never_tokenised_again(tokenizer_of):
    tokenizer = tokenizer_of(LLAMA)
    odd = np.array([5, 2, 9, 2, 4], np.int32)  # no text is encoded to these tokens
    transcript = Transcript.of_messages(tokenizer, ASKED)
    transcript.append(
        Completion(
            request_id="r",
            token_ids=odd,
            logprobs=np.full(5, -1.0, np.float32),
            versions=(),
            stop_reason=StopReason.LENGTH,
        )
    )
    transcript.add(MORE)
    start = len(transcript.opening)
    assert transcript.token_ids[start : start + 5].tolist() == odd.tolist()


def test_only_a_truncated_turn_gets_the_end_of_the_template(tokenizer_of):
    tokenizer = tokenizer_of(LLAMA)
    rest = "<|h|>user<|/h|>\n\nand 3+3?<|eot|><|h|>assistant<|/h|>\n\n"
    assert after(tokenizer, "it is", MORE, StopReason.LENGTH) == "<|eot|>" + rest
    assert after(tokenizer, "it is<|eot|>", MORE) == rest
    assert after(tokenizer, "a call<|eom|>", RESULT).startswith("<|h|>tool"), "another end than the template's"
    assert after(tokenizer, "it is\n", MORE) == "<|eot|>" + rest, "ended by a stop text"


def test_where_turns_have_no_end_the_next_ones_beginning_is_not_written_twice(tokenizer_of):
    tokenizer = tokenizer_of(NO_END)
    assert after(tokenizer, "4<|user|>", MORE) == "\nand 3+3?<|assistant|>\n"
    assert after(tokenizer, "4<|tool|>", MORE) == "<|user|>\nand 3+3?<|assistant|>\n"


def test_a_template_that_would_drop_reasoning_is_refused(tokenizer_of):
    tokenizer = tokenizer_of(FORGETFUL)
    thought = "<think>hm</think>\n4<|eot|>"
    assert after(tokenizer, thought, RESULT) == "\n<|h|>tool\n4<|eot|>\n<|h|>assistant\n"
    assert after(tokenizer, "4<|eot|>", MORE) == "\n<|h|>user\nand 3+3?<|eot|>\n<|h|>assistant\n"
    with pytest.raises(TemplateError) as error:
        after(tokenizer, thought, MORE)
    assert str(error.value) == (
        "the chat template omits text that the policy wrote (such as its reasoning) once a message of 'user' "
        "follows; set keep_past = true or another model.chat_template"
    )
    assert after(tokenizer, thought, MORE, keep_past=True) == "\n<|h|>user\nand 3+3?<|eot|>\n<|h|>assistant\n"


def test_reasoning_of_any_earlier_turn_counts(tokenizer_of):
    tokenizer = tokenizer_of(FORGETFUL)
    transcript = Transcript.of_messages(tokenizer, ASKED)
    transcript.append(drawn(tokenizer, "<think>hm</think>\ncall<|eot|>"))
    transcript.add(RESULT)
    transcript.append(drawn(tokenizer, "4<|eot|>"))
    with pytest.raises(TemplateError, match="omits text that the policy wrote"):
        transcript.add(MORE)
    assert transcript.num_tokens == len(transcript.token_ids), "nothing was added"


def test_templates_that_change_the_prompt_are_refused(tokenizer_of):
    with pytest.raises(TemplateError, match="renders earlier messages differently once a message of 'user' follows"):
        after(tokenizer_of(MOVES), "4<|eot|>", MORE)


def test_templates_that_do_not_show_a_message_are_refused(tokenizer_of):
    with pytest.raises(TemplateError, match="does not render messages of 'tool' after an assistant's"):
        after(tokenizer_of(SILENT), "4<|eot|>", RESULT)


def test_templates_that_require_a_call_before_a_result_get_one(tokenizer_of):
    tokenizer = tokenizer_of(CALLS)
    rest = "<|h|>result\n4<|eot|><|h|>assistant\n"
    assert after(tokenizer, "add<|call|>", RESULT) == rest
    assert after(tokenizer, "add", RESULT, StopReason.LENGTH) == "<|eot|>" + rest


def test_messages_are_appended_to_plain_text_unchanged(tokenizer_of):
    tokenizer = tokenizer_of(LLAMA)
    transcript = Transcript(tokenizer, tokenizer.encode("2+2="))
    transcript.append(drawn(tokenizer, "5\n"))
    transcript.add([{"role": "user", "content": "wrong\n"}])
    assert tokenizer.decode(transcript.token_ids) == "2+2=5\nwrong\n"


def test_adding_messages_requires_a_completion_first(tokenizer_of):
    with pytest.raises(ValueError, match="append a completion first"):
        Transcript.of_messages(tokenizer_of(LLAMA), ASKED).add(MORE)
