"""`penstock bench serve`: measures a server with OpenAI's API under load.

Works with any such server. Needs the extra `bench`; only `settings` is imported without it.
"""
