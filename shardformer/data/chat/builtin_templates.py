"""Chat templates by name, for tokenizers without one. Each is written from the published form of its family."""

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{- (message['content'] or '') + '<|im_end|>' -}}{% endgeneration %}
{%- else -%}
{{- (message['content'] or '') + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

LLAMA3 = """\
{{- bos_token | default('<|begin_of_text|>') -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message['role'] == 'tool' else message['role'] -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{- (message['content'] or '') | trim + '<|eot_id|>' -}}{% endgeneration %}
{%- else -%}
{{- (message['content'] or '') | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

# For tokenizers without special tokens: characters, bytes, or a small BPE.
PLAIN = """\
{%- for message in messages -%}
{{- message['role'] + ': ' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{- (message['content'] or '') + '\\n\\n' -}}{% endgeneration %}
{%- else -%}
{{- (message['content'] or '') + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "plain": PLAIN}
