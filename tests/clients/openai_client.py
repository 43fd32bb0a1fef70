"""The official openai client against a running `talon serve`: python openai_client.py BASE_URL KEY"""

import json
import sys

import openai

base_url, key = sys.argv[1:3]
client = openai.OpenAI(base_url=base_url + "/v1", api_key=key, max_retries=0, timeout=60)
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City name"}},
            "required": ["city"],
        },
    },
}]


def ask(question, **more):
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    return client.chat.completions.create(
        model="demo", messages=messages, temperature=0, extra_body=PLAIN, **more)


# Models.
models = client.models.list().data
assert [model.id for model in models] == ["demo"], models
assert client.models.retrieve("demo").owned_by == "talon"

# A chat, and the same in pieces.
answer = ask("What is 17 + 25?")
assert answer.choices[0].message.content == "17 + 25 = 42.", answer
assert answer.choices[0].finish_reason == "stop"
assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
assert answer.usage.prompt_tokens_details.cached_tokens is not None
chunks = list(ask("What is 17 + 25?", stream=True, stream_options={"include_usage": True}))
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == answer.choices[0].message.content, text
assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
with client.chat.completions.stream(
        model="demo", messages=[{"role": "user", "content": "What is 17 + 25?"}], temperature=0,
        extra_body=PLAIN) as stream:
    final = stream.get_final_completion()
assert final.choices[0].message.content == text, final

# Reasoning, as other servers' clients read it.
thinking = client.chat.completions.create(
    model="demo", messages=[{"role": "user", "content": "What is 38 + 47?"}], temperature=0,
    max_tokens=100)
assert thinking.usage.completion_tokens_details.reasoning_tokens > 0, thinking

# Log-probabilities.
told = ask("What is 17 + 25?", logprobs=True, top_logprobs=2).choices[0].logprobs.content
assert "".join(token.token for token in told) == text, told
assert all(len(token.top_logprobs) == 2 for token in told)

# The demo model really calls a tool, and uses its answer.
question = {"role": "user", "content": "What is the weather in Oslo?"}
called = ask([question], tools=TOOLS)
call = called.choices[0].message.tool_calls[0]
assert called.choices[0].finish_reason == "tool_calls"
assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
result = {"role": "tool", "tool_call_id": call.id,
          "content": json.dumps({"temperature": -4, "condition": "snowy"})}
used = ask([question, called.choices[0].message.model_dump(exclude_none=True), result], tools=TOOLS)
assert used.choices[0].message.content == "The weather in Oslo is snowy with -4 degrees.", used
with client.chat.completions.stream(
        model="demo", messages=[question], temperature=0, tools=TOOLS, extra_body=PLAIN) as stream:
    final = stream.get_final_completion()
call = final.choices[0].message.tool_calls[0]
assert json.loads(call.function.arguments) == {"city": "Oslo"}, final
forced = ask("What is 17 + 25?", tools=TOOLS, tool_choice="required", max_tokens=60)
assert forced.choices[0].message.tool_calls[0].function.name == "get_weather", forced

# A plain completion.
written = client.completions.create(
    model="demo", prompt="[gMASK]<sop>In the beginning God", max_tokens=8, temperature=0)
assert written.choices[0].text.startswith(", and the beginning"), written
pieces = client.completions.create(
    model="demo", prompt="[gMASK]<sop>In the beginning God", max_tokens=8, temperature=0, stream=True)
assert "".join(piece.choices[0].text for piece in pieces) == written.choices[0].text

# Errors.
for wrong, error in [
        ({"n": 2}, openai.BadRequestError),
        ({"max_tokens": 0}, openai.BadRequestError),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         openai.BadRequestError)]:
    try:
        ask("hi", **wrong)
    except error as raised:
        assert raised.body["message"] and raised.body["param"], raised.body
    else:
        raise AssertionError(f"{wrong} was taken")
try:
    openai.OpenAI(base_url=base_url + "/v1", api_key="wrong", max_retries=0).models.list()
except openai.AuthenticationError as raised:
    assert raised.body["code"] == "invalid_api_key", raised.body
else:
    raise AssertionError("a wrong key was taken")
try:
    client.models.retrieve("other")
except openai.NotFoundError:
    pass
else:
    raise AssertionError("there is no such model")

# Gone in the middle of a stream: the next request finds the place free.
stream = ask("What is a whale?", stream=True)
next(iter(stream))
stream.close()
assert ask("What is 17 + 25?").choices[0].message.content == text
print("openai", openai.__version__, "is content")
