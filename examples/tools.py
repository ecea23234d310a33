"""A tool: the model fills in its arguments, we call it, and the model answers with its result."""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
model = client.models.list().data[0].id


def temperature_of(city: str) -> str:
    return json.dumps({"city": city, "celsius": 21})


tools = [
    {
        "type": "function",
        "function": {
            "name": "temperature_of",
            "description": "The temperature in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
                "required": ["city"],
            },
        },
    }
]
messages = [{"role": "user", "content": "What is the temperature in Paris?"}]
# "required" forces a call and "none" forces a text, so that even a small model does both; "auto" leaves it the choice.
asked = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=tools,
    tool_choice="required",
    parallel_tool_calls=False,
    max_tokens=64,
    temperature=0,
)
message = asked.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    arguments = json.loads(call.function.arguments)
    result = temperature_of(**arguments)
    print(f"{call.function.name}(city={arguments['city']!r}) = {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
answer = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="none", max_tokens=48, temperature=0
)
print("answer:", answer.choices[0].message.content)
