//! Methods that set fields.

/// Gives a struct a method for each of these fields, which sets it and returns the struct. An optional field is set to what is
/// given.
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
