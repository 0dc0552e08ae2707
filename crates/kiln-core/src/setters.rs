//! A macro for builder methods.

/// Gives a struct a method for each of these fields, which sets the field and returns the struct. An optional
/// field is set to `Some` of the argument.
#[macro_export]
macro_rules! setters {
    ($type:ty { $($field:ident: $value:ty),+ $(,)? }) => {
        impl $type {
            $(
                #[doc = concat!("Sets `", stringify!($field), "`.")]
                pub fn $field(mut self, $field: $value) -> Self {
                    self.$field = $field.into();
                    self
                }
            )+
        }
    };
}
