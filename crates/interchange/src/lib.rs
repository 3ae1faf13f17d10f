//! Hub model directories and PEFT adapter files, in and out.
