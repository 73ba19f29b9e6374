"""The body of a request as pydantic models, and one clear message for a body that is wrong.

Unknown fields of OpenAI's protocol are ignored. Unknown keys inside Helmsight's own fields are refused, and fields that
are nearly called as those: an option that is misspelt must not silently do nothing.
"""
