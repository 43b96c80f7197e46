"""The sampling parameters of chats with people, where the files of a model set none."""

__all__ = ["CHAT_MIN_P", "CHAT_TEMPERATURE"]

#: Answers for people may vary; min-p leaves out the unlikely tokens, with which small models go astray.
CHAT_TEMPERATURE = 0.7
CHAT_MIN_P = 0.05
