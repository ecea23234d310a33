"""A question about a picture, which is drawn here or read from the file named on the command line.

The server must have a model that sees: octavo serve llava-hf/llava-1.5-7b-hf
"""

import base64
import io
import os
import sys

from openai import OpenAI
from PIL import Image, ImageDraw

if len(sys.argv) > 1:
    picture = Image.open(sys.argv[1])
else:
    picture = Image.new("RGB", (336, 336), "white")
    ImageDraw.Draw(picture).ellipse((84, 84, 252, 252), fill="red")
file = io.BytesIO()
picture.convert("RGB").save(file, "PNG")

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[
        {
            "role": "user",
            "content": [
                {
                    "type": "image_url",
                    "image_url": {"url": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()},
                },
                {"type": "text", "text": "What is in this picture?"},
            ],
        }
    ],
    max_tokens=48,
    temperature=0,
)
print(answer.choices[0].message.content)
print(f"{answer.usage.prompt_tokens} tokens of prompt, the picture's rows among them")
