"""SGLang plugin that serves DeepSeek-V4.1 by scoring only the published candidate blocks."""

__version__ = "0.1.0"
BACKEND_NAME = "dsv41-sparse"
