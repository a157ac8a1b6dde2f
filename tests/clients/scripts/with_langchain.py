"""langchain-openai."""

from harness import KEY, TEXT, URL, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

# By default it sends the tokens of OpenAI's own models.
embeddings = OpenAIEmbeddings(base_url=f"{URL}/v1", api_key=KEY, model=TEXT, check_embedding_ctx_length=False)
model = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=TEXT, max_tokens=20)


class Emoji(BaseModel):
    """What an emoji shows."""

    happy: bool


def call_tool() -> list[str]:
    calling = model.model_copy(update={"max_tokens": 60})
    answer = calling.bind_tools([Emoji], tool_choice="Emoji").invoke("a cat")
    result = ToolMessage("done", tool_call_id=answer.tool_calls[0]["id"])
    assert calling.bind_tools([Emoji]).invoke([HumanMessage("a cat"), answer, result]).content
    return [call["name"] for call in answer.tool_calls]


run({
    "chat": lambda: model.invoke("a cat").content,
    "stream": lambda: "".join(chunk.content for chunk in model.stream("a cat")),
    "batch": lambda: len(model.batch(["a cat", "a dog"])),
    "parse": lambda: model.with_structured_output(Emoji, method="json_schema").invoke("a cat").happy,
    "tools": call_tool,
    "embed": lambda: [len(vector) for vector in embeddings.embed_documents(["a cat", "a dog"])],
})  # fmt: skip
