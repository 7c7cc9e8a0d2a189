"""Small chat templates that follow the rules of published families, in words of their own."""

#: As Qwen3: thoughts of turns before the last question are dropped, calls are JSON, results are the user's.
QWEN = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

#: As Llama 3: a header and a mark for each turn; neither tools nor thoughts.
LLAMA = """\
{%- for m in messages %}<|im_start|>{{ m.role }}<|endoftext|>{{ m.content | trim }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant<|endoftext|>{% endif %}"""

#: As Gemma: the assistant is called the model, there is no system, and roles must alternate.
GEMMA = """\
{%- for m in messages %}
{%- if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate: user, assistant, user, ...') }}
{%- endif %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>model
{% endif %}"""

#: As gpt-oss: thoughts and answers are channels; thoughts before a final answer are dropped from the history.
CHANNELS = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and (loop.last or m.tool_calls) %}<|im_start|>assistant|analysis
{{ m.thinking }}<|im_end|>{% endif %}
{%- for c in m.tool_calls or [] %}<|im_start|>assistant|{{ c.function.name }}
{{ c.function.arguments | tojson }}<|im_end|>{% endfor %}
{%- if m.content %}<|im_start|>assistant|final
{{ m.content }}<|im_end|>{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
