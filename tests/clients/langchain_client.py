"""LangChain's ChatOpenAI against a running `talon serve`: python langchain_client.py BASE_URL KEY"""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

base_url, key = sys.argv[1:3]
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
model = ChatOpenAI(
    model="demo", base_url=base_url + "/v1", api_key=key, temperature=0, max_retries=0, timeout=60,
    stream_usage=True, extra_body=PLAIN)

answer = model.invoke("What is 17 + 25?")
assert answer.content == "17 + 25 = 42.", answer
assert answer.usage_metadata["total_tokens"] > 0
pieces = list(model.stream("What is 17 + 25?"))
assert "".join(piece.content for piece in pieces) == answer.content, pieces
total = pieces[0]
for piece in pieces[1:]:
    total = total + piece
assert total.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"], total
answers = model.batch(["What is 17 + 25?", "What is 38 + 47?"])
assert [a.content for a in answers] == ["17 + 25 = 42.", "38 + 47 = 85."], answers


@tool
def get_weather(city: str) -> str:
    """Get the current weather for a city."""
    return '{"temperature": -4, "condition": "snowy"}'


agent = model.bind_tools([get_weather])
messages = [HumanMessage("What is the weather in Oslo?")]
called = agent.invoke(messages)
call = called.tool_calls[0]
assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"}), called
messages += [called, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
used = agent.invoke(messages)
assert used.content == "The weather in Oslo is snowy with -4 degrees.", used
streamed = None
for piece in agent.stream("What is the weather in Oslo?"):
    streamed = piece if streamed is None else streamed + piece
assert streamed.tool_calls[0]["args"] == {"city": "Oslo"}, streamed
print("LangChain is content")
