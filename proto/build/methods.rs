// SPDX-License-Identifier: Apache-2.0
//! Generates the table of the methods of `patchbay.v1` from their options.

use std::fmt::Write;

use protox::prost_reflect::{
    DescriptorPool, DynamicMessage, ExtensionDescriptor, FieldDescriptor, Kind, MethodDescriptor,
    ReflectMessage, Value,
};

const PACKAGE: &str = "patchbay.v1";
const OPTIONS: &str = "patchbay.options.v1";

/// Returns Rust code that implements `Call` for each request type and lists all methods.
///
/// # Errors
/// A message that names the method without the option `access`, or a field with an unusable option.
pub fn table(pool: &DescriptorPool) -> Result<String, String> {
    let access = extension(pool, "access")?;
    let role_if_set = extension(pool, "role_if_set")?;
    let mut code = String::new();
    let mut requests = Vec::new();
    let services = pool.services();
    let services = services.filter(|service| service.package_name() == PACKAGE);
    let methods: Vec<_> = services
        .flat_map(|service| service.methods().collect::<Vec<_>>())
        .collect();
    for message in pool.all_messages() {
        let is_request = methods.iter().any(|method| method.input() == message);
        let mut fields = message.fields();
        let raises = |field: &FieldDescriptor| field.options().has_extension(&role_if_set);
        if let Some(field) = fields.find(|field| !is_request && raises(field)) {
            return Err(format!(
                "{}: the option ({OPTIONS}.role_if_set) has an effect in requests only",
                field.full_name()
            ));
        }
    }
    for method in methods {
        code.push_str(&implementation(&method, &access, &role_if_set)?);
        requests.push(method.input().name().to_owned());
    }
    code.push_str("/// All methods.\npub const METHODS: &[Method] = &[\n");
    for request in requests {
        let _ = writeln!(code, "    <v1::{request} as Call>::METHOD,");
    }
    code.push_str("];\n");
    Ok(code)
}

fn extension(pool: &DescriptorPool, name: &str) -> Result<ExtensionDescriptor, String> {
    let name = format!("{OPTIONS}.{name}");
    let mut extensions = pool.all_extensions();
    let found = extensions.find(|extension| extension.full_name() == name);
    found.ok_or_else(|| format!("there is no extension {name}"))
}

fn implementation(
    method: &MethodDescriptor,
    access: &ExtensionDescriptor,
    role_if_set: &ExtensionDescriptor,
) -> Result<String, String> {
    let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    let options = method.options();
    let access = options.get_extension(access);
    let access = access.as_message();
    let [role, effect] = ["role", "effect"].map(|fact| access.and_then(|it| variant_of(it, fact)));
    let (Some(role), Some(effect)) = (role, effect) else {
        return Err(format!(
            "{path} must have the option ({OPTIONS}.access) with a role and an effect"
        ));
    };
    let request = method.input();
    let mut raised = Vec::new();
    for field in request.fields() {
        let options = field.options();
        if !options.has_extension(role_if_set) {
            continue;
        }
        let value = options.get_extension(role_if_set);
        let role = variant(&role_if_set.kind(), &value);
        match role.filter(|_| field.kind() == Kind::Bool && !field.is_list()) {
            Some(role) => raised.push((field, role)),
            None => {
                return Err(format!(
                    "{}: the option ({OPTIONS}.role_if_set) needs a boolean field and a role",
                    field.full_name()
                ));
            }
        }
    }
    let has_guest = |field: FieldDescriptor| field.kind() == Kind::String && !field.is_list();
    let guest = match request.get_field_by_name("guest").is_some_and(has_guest) {
        true => "&self.guest",
        false => "\"\"",
    };
    let mut code = String::new();
    let _ = writeln!(
        code,
        "impl Call for v1::{} {{\n\
         \x20   const METHOD: Method = Method {{\n\
         \x20       service: {:?},\n\
         \x20       name: {:?},\n\
         \x20       path: {path:?},\n\
         \x20       role: Role::{role},\n\
         \x20       effect: Effect::{effect},\n\
         \x20       streams: {},\n\
         \x20       raised: &[",
        request.name(),
        method.parent_service().name(),
        method.name(),
        method.is_server_streaming(),
    );
    for (field, role) in &raised {
        let _ = writeln!(code, "            ({}, Role::{role}),", field.number());
    }
    let fields = raised
        .iter()
        .map(|(field, _)| format!("self.{}", field.name()));
    let _ = writeln!(
        code,
        "        ],\n    }};\n\n\
         \x20   fn guest(&self) -> &str {{\n\
         \x20       {guest}\n    }}\n\n\
         \x20   fn sets(&self) -> Vec<bool> {{\n\
         \x20       vec![{}]\n    }}\n}}\n",
        fields.collect::<Vec<_>>().join(", "),
    );
    Ok(code)
}

/// Returns the Rust name of the value of an enumeration's field, or `None` if it is unspecified.
fn variant_of(message: &DynamicMessage, field: &str) -> Option<String> {
    let field = message.descriptor().get_field_by_name(field)?;
    variant(&field.kind(), &message.get_field(&field))
}

fn variant(kind: &Kind, value: &Value) -> Option<String> {
    let Kind::Enum(of) = kind else {
        return None;
    };
    let number = value.as_enum_number().filter(|number| *number != 0)?;
    let value = of.get_value(number)?;
    // "ROLE_VIEWER" is the variant Viewer of Role.
    let prefix = format!("{}_", of.name().to_uppercase());
    let name = value.name().strip_prefix(&prefix)?;
    let (first, rest) = name.split_at_checked(1)?;
    Some(format!("{first}{}", rest.to_lowercase()))
}
