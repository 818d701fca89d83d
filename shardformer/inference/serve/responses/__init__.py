"""The endpoint /v1/responses: a chat in another form, whose answers later requests may continue."""
